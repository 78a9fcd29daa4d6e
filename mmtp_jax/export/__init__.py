"""Writing a target and its modules in the layouts that other engines load."""
