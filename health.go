package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"
)

// newHealthCommand is for the image, which has no shell and no curl. Hidden:
// outside a container curl says more.
func newHealthCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "health [URL]",
		Short:   "Ask a running warmroute whether it lives",
		Example: "  warmroute health http://127.0.0.1:8080/livez",
		Hidden:  true,
		Args:    cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			url := "http://127.0.0.1:8080/livez"
			if len(args) == 1 {
				url = args[0]
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 3*time.Second)
			defer cancel()
			return askHealth(ctx, url)
		},
	}
}

// askHealth fails unless url answers 200. It leaves no connection open.
func askHealth(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return nil
}
