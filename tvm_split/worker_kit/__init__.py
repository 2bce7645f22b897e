"""Pack a worker for another machine: a kit with its own files and all packages that it imports."""
