"""Words and pictures: estimates become tables, figures, files and a command line; nothing is priced."""
