"""Images in dataset rows: how they are stored, how rows with images become token ids, and processors."""
