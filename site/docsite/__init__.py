"""The documentation as a site: pages of the repository, the public names, pictures, notebooks."""
