"""Pictures of rows: what stands for one, rows with them as token ids, and the processors that prepare them."""
