"""The configuration keys of this project, and how a config file is read."""
