"""Words and pictures: estimates become tables, figures, files, a command line; prices nothing."""
