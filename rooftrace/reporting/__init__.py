"""Words and pictures: commands, views, figures, files.  Prices nothing."""
