"""HTTP server with the completions and chat endpoints that existing clients speak."""
