"""Networks of torch: modules, exported programs, and files of them."""
