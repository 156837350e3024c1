"""Training on images: reading images, rows and prompts with images, processors, and the forward pass of vision towers."""
