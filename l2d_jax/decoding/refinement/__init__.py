"""From noise to a corrected hidden state: the ODE of a diffusion token and the ways to integrate it."""
