"""Show results: as tables and sentences for people, as JSON for programs."""
