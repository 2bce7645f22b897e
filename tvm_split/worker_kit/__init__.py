"""What a worker runs from, to be brought to a machine: its own files over ssh, or a kit with all that it imports."""
