"""JIT-compiled CPU kernels, where XLA's code is slow.

Kernels are written in LLVM IR (`emit`). llvmlite, a dependency of Tunix, compiles them for the
vectors of this processor (`machine`). An `operation` is a JAX primitive. Neighbouring ones are
joined (`fusion`) into a `chain`, which programs call as one XLA foreign function: its memory layout
is checked (`abi`), and it runs on XLA's own threads (`threads`). Where any of this is missing,
`chain.unavailable` says why, and engines use XLA's own code.

Weights are in panels of 16 outputs (`panels`), activations token-major. Every kernel adds in one
order, whatever the number of tokens: a token has the same bits in any batch.
"""
