"""Pack a worker for another machine: its own source files for ssh, or a kit with all packages that it imports."""
