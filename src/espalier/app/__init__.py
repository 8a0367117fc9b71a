"""The `espalier` command. Imports the core, never the reverse."""
