package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"warmroute/config"
)

// newHealthCommand is for the image, which has no shell and no curl. Hidden:
// outside a container curl says more.
func newHealthCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "health [URL]",
		Short: "Ask a running warmroute whether it lives",
		Long: `Ask for /livez where the settings say that serve listens: those of --config or
WARMROUTE_CONFIG, of the environment, and of --listen. Or ask for URL. The exit
code is 0 when the answer is 200, else 1.`,
		Example: `  warmroute health
  warmroute health http://127.0.0.1:8000/health`,
		Hidden: true,
		Args:   cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second)
			defer cancel()
			if len(args) == 1 {
				return askHealth(ctx, args[0])
			}
			// Faults are for serve to tell: one that runs goes on when its file has got some.
			c, err := config.Load(defaultConfig, cmd.Flags(), nil)
			if c == nil {
				return errors.New(err.Error()) // Docker reserves the status 2 of a config.Errors
			}
			return askHealth(ctx, c.PublicURL()+"/livez")
		},
	}
	config.AddFlags(cmd.Flags())
	return cmd
}

// askHealth fails unless url answers 200. It leaves no connection open.
func askHealth(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		// The certificate names what clients call this machine, and is not for an address of it.
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}
