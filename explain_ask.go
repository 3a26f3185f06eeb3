package main

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

	"github.com/spf13/pflag"

	"warmroute/config"
	"warmroute/proxy"
)

// mostExplained is longer than any explanation: a fleet of thousands.
const mostExplained = 16 << 20

func (o *explainOptions) run(ctx context.Context, stdin io.Reader, out io.Writer) error {
	body, err := o.body(stdin)
	if err != nil {
		return err
	}
	admin, err := o.listener()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, explainPatience)
	defer cancel()
	answer, err := o.ask(ctx, admin, body)
	if err != nil {
		return err
	}
	var e proxy.Explanation
	if err := json.Unmarshal(answer, &e); err != nil || e.Sentence == "" {
		return fmt.Errorf("%s answers, but not as an admin listener of warmroute; --admin URL names the right one", admin.base)
	}
	if o.json {
		_, err = fmt.Fprintln(out, strings.TrimSpace(printable(string(answer))))
		return err
	}
	return printExplanation(out, &e)
}

// readRequest reads a request's body. How long it may be, the server says.
func readRequest(name string) ([]byte, error) {
	body, err := os.ReadFile(name)
	if err != nil {
		return nil, usageError{config.ReadError("-f", name, err)}
	}
	return body, nil
}

// adminListener is where an admin listener is asked, and how.
type adminListener struct {
	base    string
	token   string      // empty: none
	trusted *tls.Config // verifies its certificate; nil: the system's authorities do
}

// listener returns the admin listener that the flags, or else the settings, name.
func (o *explainOptions) listener() (l adminListener, err error) {
	if o.admin == "" || o.tokenFile == "" {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		flags.String("config", o.config, "")
		// Faults are for serve to tell, which goes on when its file has got some.
		c, err := config.Load(defaultConfig, flags, nil)
		if c == nil {
			return l, err
		}
		if l.base, l.token = c.AdminURL(), c.AdminToken; l.base == "" && o.admin == "" {
			return l, errors.New(`the settings have no admin listener (admin: ""); --admin URL names one`)
		}
		if o.admin == "" && o.caFile == "" && c.AdminTLS.CertFile != "" {
			if l.trusted, err = trustOwn(c.AdminTLS.CertFile); err != nil {
				return l, err
			}
		}
	}
	if o.tokenFile != "" {
		text, err := config.ReadFile(o.tokenFile)
		if err != nil {
			return l, usageError{config.ReadError("--token-file", o.tokenFile, err)}
		}
		if l.token = string(bytes.TrimSpace(text)); l.token == "" || !config.IsHeaderValue(l.token) {
			return l, fmt.Errorf("--token-file: %s holds no token: one line of text is expected", o.tokenFile)
		}
	}
	if o.caFile != "" {
		if l.trusted, err = trustAuthorities(o.caFile); err != nil {
			return l, err
		}
	}
	if o.admin != "" {
		l.base = strings.TrimRight(o.admin, "/")
		if !strings.Contains(l.base, "://") {
			l.base = "http://" + l.base
		}
		if u, err := url.Parse(l.base); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return l, fmt.Errorf("--admin: %q is no URL of an admin listener; it is like http://127.0.0.1:9090", o.admin)
		}
	}
	return l, nil
}

// trustAuthorities returns what verifies a certificate by the authorities in a file.
func trustAuthorities(file string) (*tls.Config, error) {
	text, err := config.ReadFile(file)
	if err != nil {
		return nil, usageError{config.ReadError("--ca-file", file, err)}
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("--ca-file: %s holds no certificate in PEM form", file)
	}
	return &tls.Config{RootCAs: pool}, nil
}

// trustOwn returns what verifies that a listener of this machine has the certificate
// in a file, whatever name it is for: it is asked by its address.
func trustOwn(file string) (*tls.Config, error) {
	text, err := config.ReadRegularFile(file)
	if err != nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %w; --ca-file FILE verifies the listener's certificate instead", err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %s holds no certificate in PEM form", file)
	}
	own, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("admin_tls.cert_file: %s: %w", file, err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(own)
	c := &tls.Config{RootCAs: pool}
	switch {
	case len(own.DNSNames) > 0:
		c.ServerName = strings.TrimPrefix(own.DNSNames[0], "*.")
		if c.ServerName != own.DNSNames[0] {
			c.ServerName = "any." + c.ServerName
		}
	case len(own.IPAddresses) > 0:
		c.ServerName = own.IPAddresses[0].String()
	}
	return c, nil
}

// header is what goes along with the body.
func (o *explainOptions) header() (http.Header, error) {
	h := http.Header{"Content-Type": {"application/json"}}
	for _, line := range o.headers {
		name, value, ok := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !ok || name == "" || !config.IsHeaderValue(name) || !config.IsHeaderValue(value) {
			return nil, fmt.Errorf("--header %q is no header; it is like 'X-Warmroute-Priority: 5'", line)
		}
		switch http.CanonicalHeaderKey(name) {
		case "Authorization", "X-Api-Key":
			return nil, fmt.Errorf("--header %s: no key goes along; --key NAME says whose request it is, --token-file what the admin listener asks for", name)
		}
		h.Add(name, value)
	}
	return h, nil
}

// ask puts the question, and says of what can be mended how.
func (o *explainOptions) ask(ctx context.Context, admin adminListener, body []byte) ([]byte, error) {
	query := url.Values{}
	for name, value := range map[string]string{"endpoint": o.endpoint, "key": o.key} {
		if value != "" {
			query.Set(name, value)
		}
	}
	query["tried"] = o.tried
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, admin.base+"/api/explain?"+query.Encode(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if req.Header, err = o.header(); err != nil {
		return nil, err
	}
	if admin.token != "" {
		req.Header.Set("Authorization", "Bearer "+admin.token)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true, TLSClientConfig: admin.trusted}).RoundTrip(req)
	var unverified *tls.CertificateVerificationError
	if errors.As(err, &unverified) {
		return nil, fmt.Errorf("the certificate of %s is not trusted: %w; --ca-file FILE names the authority that signed it", admin.base, unverified.Err)
	}
	if err != nil {
		return nil, fmt.Errorf("no admin listener answers at %s: %w; is warmroute running there? --admin URL names another", admin.base, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, mostExplained))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", admin.base, err)
	}
	if resp.StatusCode == http.StatusOK {
		return answer, nil
	}
	return nil, refusedBy(admin.base, resp, answer)
}

// refusedBy makes an error of an answer that explains nothing.
func refusedBy(base string, resp *http.Response, answer []byte) error {
	var said struct {
		Error struct{ Message, Src, Code string }
	}
	_ = json.Unmarshal(answer, &said) // what is no error of ours has no such message
	switch {
	case resp.StatusCode == http.StatusBadRequest && strings.Contains(string(answer), "HTTP request to an HTTPS server"):
		return fmt.Errorf("%s speaks https: --admin https://…", base)
	case said.Error.Src != "warmroute", said.Error.Code == "not_found": // the latter is what the public listener says
		return fmt.Errorf("%s answers %s, and is no admin listener of warmroute; --admin URL names the right one", base, printable(resp.Status))
	case resp.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%s asks for its admin token: give it with --token-file FILE, or set WARMROUTE_ADMIN_TOKEN", base)
	}
	return errors.New(printable(cmp.Or(said.Error.Message, resp.Status)))
}
