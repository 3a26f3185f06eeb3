// Package cli has the commands of warmroute that simulate and measure.
package cli

import (
	"github.com/spf13/cobra"

	"warmroute/config"
)

// Commands returns the commands. configs loads the configuration of proxies and routers that
// they run.
func Commands(configs config.Loader) []*cobra.Command {
	return []*cobra.Command{newDemoCommand(configs), newSimCommand(), newReplayCommand(configs), newBenchCommand()}
}
