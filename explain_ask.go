package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/pflag"

	"warmroute/proxy"
)

// mostExplained is longer than any explanation: a fleet of thousands.
const mostExplained = 16 << 20

func (o *explainOptions) run(ctx context.Context, stdin io.Reader, out io.Writer) error {
	body, err := o.body(stdin)
	if err != nil {
		return err
	}
	base, token, err := o.listener()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, explainPatience)
	defer cancel()
	answer, err := o.ask(ctx, base, token, body)
	if err != nil {
		return err
	}
	var e proxy.Explained
	if err := json.Unmarshal(answer, &e); err != nil || e.Sentence == "" {
		return fmt.Errorf("%s answers, but not as an admin listener of warmroute; --admin URL names the right one", base)
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
		return nil, misuse{cannotRead("-f", name, err)}
	}
	return body, nil
}

// listener is where the admin listener is, and the token for it.
func (o *explainOptions) listener() (base, token string, err error) {
	if o.admin == "" || o.tokenFile == "" {
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		flags.String("config", o.config, "")
		// Faults are for serve to tell, which goes on when its file has got some.
		c, err := loadConfig(flags, nil)
		if c == nil {
			return "", "", err
		}
		if base, token = c.adminURL(), c.AdminToken; base == "" && o.admin == "" {
			return "", "", errors.New(`the settings have no admin listener (admin: ""); --admin URL names one`)
		}
	}
	if o.tokenFile != "" {
		text, err := readOnce(o.tokenFile)
		if err != nil {
			return "", "", misuse{cannotRead("--token-file", o.tokenFile, err)}
		}
		if token = string(bytes.TrimSpace(text)); token == "" || !isHeaderText(token) {
			return "", "", fmt.Errorf("--token-file: %s holds no token: one line of text is expected", o.tokenFile)
		}
	}
	if o.admin != "" {
		base = strings.TrimRight(o.admin, "/")
		if !strings.Contains(base, "://") {
			base = "http://" + base
		}
		if u, err := url.Parse(base); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return "", "", fmt.Errorf("--admin: %q is no URL of an admin listener; it is like http://127.0.0.1:9090", o.admin)
		}
	}
	return base, token, nil
}

// adminURL is where the admin listener is asked from its own machine; "" where
// there is none.
func (c *Config) adminURL() string {
	if _, _, err := net.SplitHostPort(c.Admin); err != nil {
		return ""
	}
	return "http://" + fromHere(c.Admin)
}

// header is what goes along with the body.
func (o *explainOptions) header() (http.Header, error) {
	h := http.Header{"Content-Type": {"application/json"}}
	for _, line := range o.headers {
		name, value, ok := strings.Cut(line, ":")
		name, value = strings.TrimSpace(name), strings.TrimSpace(value)
		if !ok || name == "" || !isHeaderText(name) || !isHeaderText(value) {
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
func (o *explainOptions) ask(ctx context.Context, base, token string, body []byte) ([]byte, error) {
	query := url.Values{}
	for name, value := range map[string]string{"endpoint": o.endpoint, "key": o.key} {
		if value != "" {
			query.Set(name, value)
		}
	}
	query["tried"] = o.tried
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/api/explain?"+query.Encode(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if req.Header, err = o.header(); err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("no admin listener answers at %s: %w; is warmroute running there? --admin URL names another", base, err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, mostExplained))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", base, err)
	}
	if resp.StatusCode == http.StatusOK {
		return answer, nil
	}
	return nil, refusedBy(base, resp, answer)
}

// refusedBy makes an error of an answer that explains nothing.
func refusedBy(base string, resp *http.Response, answer []byte) error {
	var said struct {
		Error struct{ Message, Src, Code string }
	}
	_ = json.Unmarshal(answer, &said) // what is no error of ours has no such message
	switch {
	case said.Error.Src != "warmroute", said.Error.Code == "not_found": // the latter is what the public listener says
		return fmt.Errorf("%s answers %s, and is no admin listener of warmroute; --admin URL names the right one", base, printable(resp.Status))
	case resp.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%s asks for its admin token: give it with --token-file FILE, or set WARMROUTE_ADMIN_TOKEN", base)
	}
	return errors.New(printable(cmp.Or(said.Error.Message, resp.Status)))
}
