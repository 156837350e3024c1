"""Run records on disk, and reports made from them."""
