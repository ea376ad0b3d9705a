"""Structure: modules become operator graphs.  The only package that imports torch, and lazily."""
