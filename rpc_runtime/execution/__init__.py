"""What computes on a machine: stages loaded into TVM's runtime, their order, kernels timed, blobs kept."""
