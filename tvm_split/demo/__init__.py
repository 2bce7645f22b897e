"""The demonstration: a small convolutional network, trained on real digits, split over three worker processes."""
