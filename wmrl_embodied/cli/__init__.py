"""One thin file a command; everything they do lives on lower floors."""
