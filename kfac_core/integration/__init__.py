"""What the integrations of frameworks have in common."""
