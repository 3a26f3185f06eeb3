package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/proxy"
)

const (
	explainTimeout = 15 * time.Second
)

type explainOptions struct {
	AdminListener
	file           string
	endpoint, key  string
	tried, headers []string
	json           bool
}

func newExplainCommand(configs config.Loader) *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain -f FILE",
		Short: "Show where a running proxy would route a request, and why",
		Long: `Send a request body to the admin listener of a running proxy, which reports where
it would route the request now: for each backend the prompt tokens that it likely
has cached, its load and the resulting cost, and the choice in a sentence. No
request is sent to a replica, and the state of the router does not change.

The address and the token of the admin listener come from the configuration of
the proxy (--config or WARMROUTE_CONFIG, WARMROUTE_ADMIN, WARMROUTE_ADMIN_TOKEN)
or from --admin, --token-file and --ca-file. Request headers that affect routing,
such as a conversation or a priority, are given with --header, and the API key by its
name with --key.`,
		Example: `  warmroute explain -f request.json
  echo '{"model":"m","messages":[{"role":"user","content":"Hello"}]}' | warmroute explain -f -
  warmroute explain -f request.json --tried gpu-0
  warmroute explain --admin http://gateway:9090 --token-file token -f request.json --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return err
			}
			if o.file == "" {
				return fmt.Errorf("-f is missing: name a file with the request body, or - for standard input")
			}
			_, err := o.parseHeaders()
			return err
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.run(cmd.Context(), configs, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	o.addFlags(cmd.Flags())
	return cmd
}

func (o *explainOptions) addFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVarP(&o.file, "file", "f", "", "`FILE` with the request body, or - for standard input")
	o.AdminListener.addFlags(f)
	f.StringVar(&o.endpoint, "endpoint", "", "`PATH` of the request (default /v1/chat/completions)")
	f.StringVar(&o.key, "key", "", "`NAME` of the API key of the request; never the key itself")
	f.StringArrayVar(&o.tried, "tried", nil, "`NAME` of a backend where the request has already failed (repeatable)")
	f.StringArrayVarP(&o.headers, "header", "H", nil, "request `HEADER`, such as 'X-Warmroute-Priority: 5' (repeatable)")
	f.BoolVar(&o.json, "json", false, "print the response of the admin listener as JSON")
}

func (o *explainOptions) run(ctx context.Context, configs config.Loader, stdin io.Reader, out io.Writer) error {
	body, err := o.readBody(stdin)
	if err != nil {
		return err
	}
	admin, err := o.resolveAdminEndpoint(configs)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, explainTimeout)
	defer cancel()
	response, err := o.post(ctx, admin, body)
	if err != nil {
		return err
	}
	var e proxy.Explanation
	if err := json.Unmarshal(response, &e); err != nil || e.Sentence == "" {
		return fmt.Errorf("%s is not an admin listener of warmroute: name the right one with --admin", admin.url)
	}
	if o.json {
		return writeRawJSON(out, response)
	}
	return writeExplanation(out, &e)
}

func (o *explainOptions) readBody(stdin io.Reader) ([]byte, error) {
	if o.file == "-" {
		return io.ReadAll(stdin)
	}
	body, err := os.ReadFile(o.file)
	if err != nil {
		return nil, UsageError{fmt.Errorf("-f: %w", err)}
	}
	return body, nil
}

// parseHeaders returns the header of the request to the admin listener.
func (o *explainOptions) parseHeaders() (http.Header, error) {
	h := http.Header{"Content-Type": {"application/json"}}
	for _, line := range o.headers {
		name, value, ok := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !ok || name == "" || !config.IsHeaderValue(name) || !config.IsHeaderValue(value) {
			return nil, fmt.Errorf("--header: %q is not a header such as 'X-Warmroute-Priority: 5'", line)
		}
		switch http.CanonicalHeaderKey(name) {
		case "Authorization", "X-Api-Key":
			return nil, fmt.Errorf("--header %s: keys are not sent: name the request's API key with --key NAME, and the admin token with "+
				"--token-file", name)
		}
		h.Add(name, value)
	}
	return h, nil
}

func (o *explainOptions) post(ctx context.Context, admin adminEndpoint, body []byte) ([]byte, error) {
	query := url.Values{}
	for name, value := range map[string]string{"endpoint": o.endpoint, "key": o.key} {
		if value != "" {
			query.Set(name, value)
		}
	}
	query["tried"] = o.tried
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, admin.url+"/api/explain?"+query.Encode(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if req.Header, err = o.parseHeaders(); err != nil {
		return nil, err
	}
	return admin.send(req)
}
