package cli

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/pflag"

	"warmroute/config"
)

const maxAdminResponseBytes = 16 << 20 // enough for thousands of backends

// AdminListener names the admin listener of a running proxy. What is empty is taken from the configuration.
type AdminListener struct {
	URL       string
	TokenFile string // has the admin token
	CAFile    string // has certificate authorities
	Config    string // configuration of the proxy
	URLFlag   string // name of the flag with the URL, for errors; empty: admin
}

// Get requests a path and returns the body of the response, which the caller closes. The error is that of a response with
// another status than 2xx, or what is wrong with the options or the connection.
func (l *AdminListener) Get(ctx context.Context, configs config.Loader, path string) (io.ReadCloser, error) {
	endpoint, err := l.resolveAdminEndpoint(configs)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, endpoint.url+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := endpoint.roundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode/100 == 2 {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	_, err = endpoint.readBody(resp)
	return nil, err
}

// addFlags adds the flags of commands that request something of the listener.
func (l *AdminListener) addFlags(f *pflag.FlagSet) {
	f.StringVar(&l.URL, "admin", "", "`URL` of the admin listener (default: from the configuration)")
	f.StringVar(&l.TokenFile, "token-file", "", "read the admin token from `FILE` (default: from the configuration)")
	f.StringVar(&l.CAFile, "ca-file", "", "trust the certificate authorities in `FILE` (default: the configured certificate; with --admin, "+
		"the system's authorities)")
	f.StringVar(&l.Config, "config", "", "configuration `FILE` of the proxy (default: $WARMROUTE_CONFIG)")
}

// adminEndpoint is the URL and the credentials of an admin listener.
type adminEndpoint struct {
	url   string
	flag  string      // with the URL, such as --admin
	token string      // empty: none
	from  string      // names what gave the token, for errors
	tls   *tls.Config // nil: the system's authorities verify the certificate
}

// resolveAdminEndpoint returns the admin listener that the flags or else the
// configuration name. It reads the files with the token and the certificates.
func (l *AdminListener) resolveAdminEndpoint(configs config.Loader) (a adminEndpoint, err error) {
	a.flag = "--" + cmp.Or(l.URLFlag, "admin")
	if l.URL == "" || l.TokenFile == "" {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		flags.String("config", l.Config, "")
		// Errors of single settings do not matter: the proxy may have been started before the file got them.
		c, err := configs.Load(flags, nil)
		if c == nil {
			return a, err
		}
		a.token, a.from = c.AdminToken, c.AdminTokenSource
		if a.url = c.AdminURL(); a.url == "" && l.URL == "" {
			return a, errors.New(`the configuration has no admin listener (admin: ""): name one with --admin`)
		}
		if l.URL == "" && l.CAFile == "" && c.AdminTLS.CertFile != "" {
			if a.tls, err = loadPinnedTLSConfig(c.AdminTLS.CertFile); err != nil {
				return a, err
			}
		}
	}
	if l.TokenFile != "" {
		text, err := config.ReadFileOrPipe(l.TokenFile)
		if err != nil {
			return a, UsageError{fmt.Errorf("--token-file: %w", err)}
		}
		if a.token = string(bytes.TrimSpace(text)); a.token == "" || !config.IsHeaderValue(a.token) {
			return a, fmt.Errorf("--token-file: %s has no token: expected one line of text", l.TokenFile)
		}
		a.from = "--token-file " + l.TokenFile
	}
	if l.CAFile != "" {
		if a.tls, err = LoadCAFile(l.CAFile); err != nil {
			return a, err
		}
	}
	if l.URL != "" {
		a.url = strings.TrimRight(l.URL, "/")
		if !strings.Contains(a.url, "://") {
			a.url = "http://" + a.url
		}
		if u, err := url.Parse(a.url); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return a, fmt.Errorf("%s: %q is not a URL such as http://127.0.0.1:9090", a.flag, l.URL)
		}
	}
	return a, nil
}

// request sends a request with a JSON body, which may be empty, and returns the response's body.
func (a *adminEndpoint) request(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, a.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	return a.send(req)
}

// send sends a request with the token, and returns the body of the response. The error is that of a response
// with another status than 2xx.
func (a *adminEndpoint) send(req *http.Request) ([]byte, error) {
	resp, err := a.roundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return a.readBody(resp)
}

// roundTrip sends a request with the token.
func (a *adminEndpoint) roundTrip(req *http.Request) (*http.Response, error) {
	if a.token != "" {
		req.Header.Set("Authorization", "Bearer "+a.token)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true, TLSClientConfig: a.tls}).RoundTrip(req)
	if described := DescribeTLSError(err, a.url, a.flag); described != nil {
		return nil, described
	}
	if err != nil {
		return nil, fmt.Errorf("connect to the admin listener at %s: %w: check that the proxy runs, or name another address with %s", a.url, err,
			a.flag)
	}
	return resp, nil
}

// readBody returns the body of a response, and the error of one with another status than 2xx.
func (a *adminEndpoint) readBody(resp *http.Response) ([]byte, error) {
	response, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminResponseBytes))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", a.url, err)
	}
	if resp.StatusCode/100 == 2 {
		return response, nil
	}
	return response, a.responseError(resp, response)
}

// responseError returns the error for a response with another status than 2xx.
func (a *adminEndpoint) responseError(resp *http.Response, response []byte) error {
	var body struct {
		Error struct{ Message, Src, Code string }
	}
	_ = json.Unmarshal(response, &body) // the response of another server has no such fields
	switch {
	case IsHTTPSRequired(resp.StatusCode, response):
		return fmt.Errorf("%s requires https: use %s https://…", a.url, a.flag)
	case body.Error.Src != "warmroute", body.Error.Code == "not_found": // not_found: the public listener
		return fmt.Errorf("%s is not an admin listener of warmroute (%s): name the right one with %s", a.url, stripUnprintable(resp.Status),
			a.flag)
	case resp.StatusCode == http.StatusUnauthorized && a.token != "":
		return fmt.Errorf("%s: %s (the token is that of %s)", a.url, stripUnprintable(body.Error.Message), a.from)
	case resp.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%s requires the admin token: use --token-file, or set WARMROUTE_ADMIN_TOKEN", a.url)
	}
	return errors.New(stripUnprintable(cmp.Or(body.Error.Message, resp.Status)))
}
