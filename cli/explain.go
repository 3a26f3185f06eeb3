package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
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
	explainTimeout          = 15 * time.Second
	maxExplainResponseBytes = 16 << 20 // enough for thousands of backends
)

type explainOptions struct {
	admin, tokenFile, config string
	caFile                   string
	file                     string
	endpoint, key            string
	tried, headers           []string
	json                     bool
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
such as a session or a priority, are given with --header, and the API key by its
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
	f.StringVar(&o.admin, "admin", "", "`URL` of the admin listener (default: from the configuration)")
	f.StringVar(&o.tokenFile, "token-file", "", "read the admin token from `FILE` (default: from the configuration)")
	f.StringVar(&o.caFile, "ca-file", "", "trust the certificate authorities in `FILE` (default: the configured certificate; with --admin, the system's authorities)")
	f.StringVar(&o.config, "config", "", "configuration `FILE` of the proxy (default: $WARMROUTE_CONFIG)")
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
		_, err = fmt.Fprintln(out, strings.TrimSpace(stripUnprintable(string(response))))
		return err
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

// adminEndpoint is the URL and the credentials of an admin listener.
type adminEndpoint struct {
	url   string
	token string      // empty: none
	tls   *tls.Config // nil: the system's authorities verify the certificate
}

// resolveAdminEndpoint returns the admin listener that the flags or else the
// configuration name. It reads the files with the token and the certificates.
func (o *explainOptions) resolveAdminEndpoint(configs config.Loader) (a adminEndpoint, err error) {
	if o.admin == "" || o.tokenFile == "" {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		flags.String("config", o.config, "")
		// Errors of single settings do not matter: the proxy may have been started before the file got them.
		c, err := configs.Load(flags, nil)
		if c == nil {
			return a, err
		}
		if a.url, a.token = c.AdminURL(), c.AdminToken; a.url == "" && o.admin == "" {
			return a, errors.New(`the configuration has no admin listener (admin: ""): name one with --admin`)
		}
		if o.admin == "" && o.caFile == "" && c.AdminTLS.CertFile != "" {
			if a.tls, err = loadPinnedTLSConfig(c.AdminTLS.CertFile); err != nil {
				return a, err
			}
		}
	}
	if o.tokenFile != "" {
		text, err := config.ReadFileOrPipe(o.tokenFile)
		if err != nil {
			return a, UsageError{fmt.Errorf("--token-file: %w", err)}
		}
		if a.token = string(bytes.TrimSpace(text)); a.token == "" || !config.IsHeaderValue(a.token) {
			return a, fmt.Errorf("--token-file: %s has no token: expected one line of text", o.tokenFile)
		}
	}
	if o.caFile != "" {
		if a.tls, err = loadCATLSConfig(o.caFile); err != nil {
			return a, err
		}
	}
	if o.admin != "" {
		a.url = strings.TrimRight(o.admin, "/")
		if !strings.Contains(a.url, "://") {
			a.url = "http://" + a.url
		}
		if u, err := url.Parse(a.url); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return a, fmt.Errorf("--admin: %q is not a URL such as http://127.0.0.1:9090", o.admin)
		}
	}
	return a, nil
}

// loadCATLSConfig reads certificate authorities from a file, and returns a TLS configuration that trusts them.
func loadCATLSConfig(caFile string) (*tls.Config, error) {
	text, err := config.ReadFileOrPipe(caFile)
	if err != nil {
		return nil, UsageError{fmt.Errorf("--ca-file: %w", err)}
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--ca-file: %s has no certificate in PEM format", caFile)
	}
	return &tls.Config{RootCAs: pool}, nil
}

// loadPinnedTLSConfig reads a certificate from a file, and returns a TLS configuration that accepts this
// one alone, whatever its name: a listener of the same machine is reached by its address.
func loadPinnedTLSConfig(certFile string) (*tls.Config, error) {
	text, err := config.ReadRegularFile(certFile)
	if err != nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %w: use --ca-file instead", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %s has no certificate in PEM format", certFile)
	}
	verify := func(s tls.ConnectionState) error {
		if !bytes.Equal(s.PeerCertificates[0].Raw, block.Bytes) {
			return &tls.CertificateVerificationError{Err: fmt.Errorf("it is not the one in %s", certFile)}
		}
		return nil
	}
	return &tls.Config{InsecureSkipVerify: true, VerifyConnection: verify}, nil
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
			return nil, fmt.Errorf("--header %s: keys are not sent: name the request's API key with --key NAME, and the admin token with --token-file", name)
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
	if admin.token != "" {
		req.Header.Set("Authorization", "Bearer "+admin.token)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true, TLSClientConfig: admin.tls}).RoundTrip(req)
	var unverified *tls.CertificateVerificationError
	if errors.As(err, &unverified) {
		return nil, fmt.Errorf("verify the certificate of %s: %w: name its authority with --ca-file", admin.url, unverified.Err)
	}
	if err != nil {
		return nil, fmt.Errorf("connect to the admin listener at %s: %w: check that the proxy runs, or name another address with --admin", admin.url, err)
	}
	defer resp.Body.Close()
	response, err := io.ReadAll(io.LimitReader(resp.Body, maxExplainResponseBytes))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", admin.url, err)
	}
	if resp.StatusCode == http.StatusOK {
		return response, nil
	}
	return nil, explainError(admin.url, resp, response)
}

// explainError returns the error for a response with a status other than 200.
func explainError(base string, resp *http.Response, response []byte) error {
	var body struct {
		Error struct{ Message, Src, Code string }
	}
	_ = json.Unmarshal(response, &body) // the response of another server has no such fields
	switch {
	case resp.StatusCode == http.StatusBadRequest && strings.Contains(string(response), "HTTP request to an HTTPS server"):
		return fmt.Errorf("%s requires https: use --admin https://…", base)
	case body.Error.Src != "warmroute", body.Error.Code == "not_found": // not_found: the public listener
		return fmt.Errorf("%s is not an admin listener of warmroute (%s): name the right one with --admin", base, stripUnprintable(resp.Status))
	case resp.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%s requires the admin token: use --token-file, or set WARMROUTE_ADMIN_TOKEN", base)
	}
	return errors.New(stripUnprintable(cmp.Or(body.Error.Message, resp.Status)))
}
