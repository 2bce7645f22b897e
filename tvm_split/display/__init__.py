"""How results are shown: tables and sentences for people, JSON for programs."""
