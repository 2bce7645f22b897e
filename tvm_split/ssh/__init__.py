"""Workers that are brought to machines and started there over ssh, and ended again."""
