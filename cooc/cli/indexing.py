"""Commands: see cooc/cli/__init__.py."""
