"""flowsim: exact gradient flow, its saddles and their spectra, theory against it."""
