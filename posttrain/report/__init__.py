"""Run records on disk, and reports that are built from them."""
