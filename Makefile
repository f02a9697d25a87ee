# Thin names for what Cargo and the development helper do: see `cargo xtask --help`.
XTASK := cargo xtask

.DEFAULT_GOAL := help
.PHONY: help build test bench fuzz lint fmt demo demo-down crds images cluster-up cluster-down clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# The helper itself, not quietly: the first time takes minutes.
xtask:
	@cargo build --features dev --bin xtask

build: ## Build the programs
	cargo build

test: xtask ## Run all tests, also those on a real cluster; the last line counts them
	@$(XTASK) test

bench: ## Measure the manager against the raw limit; BENCH holds options
	@$(XTASK) bench $(BENCH)

fuzz: ## Templates and machines that nobody would write, for an hour (FUZZ_SECONDS)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} cargo test --release --no-default-features --features schema --test fuzz -- --nocapture

lint: ## Check format and lints
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings

fmt: ## Format the source
	cargo fmt

demo: xtask ## From nothing to a running guest, on this machine or on the cluster of KUBECONFIG
	@$(XTASK) demo

demo-down: ## Take the demo away again
	@$(XTASK) demo-down

crds: ## Generate crds/*.yaml from the types
	@$(XTASK) crds

images: ## Build the container images
	@$(XTASK) images

cluster-up: ## Start a one-node Kubernetes on this machine
	@$(XTASK) cluster up

cluster-down: ## End it
	@$(XTASK) cluster down

clean: cluster-down ## Remove all that was built in this tree
	rm -rf .dev target
