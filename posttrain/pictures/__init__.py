"""Images in dataset rows: how they are stored, rows with images as token ids, and processors."""
