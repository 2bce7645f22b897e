"""What a model's pieces take on each machine, and tensors between them: measured there, and kept between runs."""
