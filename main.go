// Warmroute is a reverse proxy for several vLLM replicas that speaks the OpenAI
// API and routes each request by the prompt prefixes that the replicas have
// cached and by their load.
package main

import (
	"context"
	_ "embed" // for config.yaml
	"os"
	"os/signal"
	"syscall"

	"warmroute/cli"
	"warmroute/config"
	labcli "warmroute/lab/cli"
	"warmroute/lab/policies"
	"warmroute/server"
)

//go:embed config.yaml
var defaultConfig []byte

func main() {
	ctx, stop := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		first := <-signals
		signal.Stop(signals) // the second one kills the process
		stop(server.StopSignal{Signal: first})
	}()
	configs := config.Loader{Defaults: defaultConfig, Policies: policies.All()}
	os.Exit(cli.Run(ctx, os.Args[1:], configs, labcli.Commands(configs), os.Stdout, os.Stderr))
}
