"""What tensors take between machines, measured over the runtime that models run on."""
