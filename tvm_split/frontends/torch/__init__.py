"""Import networks of torch: modules, exported programs, and files of exported programs."""
