# The usual names for what .ci/run does; it says what each stage needs and runs.

.DEFAULT_GOAL := help
.PHONY: help build test race lint fuzz worlds demo e2e ci

help: ## list the targets
	@sed -n 's/^\([a-z0-9]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

build: ## build ./warmroute
	go build -o warmroute .

test: ## run all tests that need only Go
	.ci/run test

race: ## run them with the race detector
	.ci/run race

lint: ## gofmt, go vet and staticcheck
	.ci/run format vet staticcheck

fuzz: ## run each fuzz target for a few seconds
	.ci/run fuzz

worlds: ## compare routing in drawn worlds with the committed figures
	.ci/run worlds

demo: ## compare two policies, each with a fleet of simulated replicas
	@echo "building, which takes about a minute the first time"
	go run . demo

e2e: ## run the tests that start the program, without those with a build tag
	go test ./e2e

ci: ## run every stage that has to pass before a change is merged
	.ci/run
