#!/bin/bash
# usage: with_mps.sh command...: run a command whose processes share GPUs, under an MPS of its own that ends with it
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
nvidia-cuda-mps-control -d || exit 1
trap 'echo quit | nvidia-cuda-mps-control; rm -rf "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"' EXIT
"$@"
