"""Preconditioners of gradients' second moments: roots and bases (Shampoo, SOAP)."""
