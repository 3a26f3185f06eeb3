package cli

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

const healthTimeout = 3 * time.Second

// newHealthCommand returns the health command, for container images without a shell
// and curl.
func newHealthCommand(configs config.Loader) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "health [URL]",
		Short: "Check that a running proxy is alive",
		Long: `Request /livez from the proxy on this machine whose configuration is given, or
request URL. The exit status is 0 if the response has status 200, else 1.`,
		Example: `  warmroute health
  warmroute health http://127.0.0.1:8000/health`,
		Args: requireArgs(0, 1, "name one URL or none"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), healthTimeout)
			defer cancel()
			if len(args) == 1 {
				return CheckHealth(ctx, args[0])
			}
			// Errors of single settings do not matter: the proxy may have been started
			// before the file got them.
			c, err := configs.Load(cmd.Flags(), nil)
			if c == nil {
				return errors.New(err.Error()) // not status 2, which Docker reserves
			}
			return CheckHealth(ctx, c.PublicURL()+"/livez")
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.String("config", "", "configuration `FILE` of the proxy (default: $WARMROUTE_CONFIG)")
	f.String("listen", "", "`ADDRESS` on which the proxy listens for clients (default: from the configuration)")
	return cmd
}

// CheckHealth returns an error unless GET url has status 200. It does not verify certificates.
func CheckHealth(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		// The certificate has the name that clients use, not a local address.
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
