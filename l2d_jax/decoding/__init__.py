"""From a prompt to an answer: solvers of the diffusion, sampling, search and likelihoods."""
