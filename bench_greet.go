package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// benchTarget is an endpoint under measurement, and what was seen of it.
type benchTarget struct {
	name  string // its letter in the table
	url   string // without /v1
	key   string
	model string

	seen benchTally
}

const (
	greetTimeout   = 10 * time.Second
	maxModelsBytes = 1 << 20
)

// greet finds out, before minutes are spent on it, whether the endpoint answers
// and which model to ask for.
func (t *benchTarget) greet(ctx context.Context, client *http.Client) error {
	ctx, cancel := context.WithTimeout(ctx, greetTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.url+"/v1/models", nil)
	if err != nil {
		return err
	}
	if t.key != "" {
		req.Header.Set("Authorization", "Bearer "+t.key)
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s did not answer within %v: is that its address, and no firewall between?", t.url, greetTimeout)
	case err != nil:
		if e := (*url.Error)(nil); errors.As(err, &e) {
			err = e.Err
		}
		return fmt.Errorf("%s cannot be reached: %w; is it running, and is that its address?", t.url, err)
	}
	defer resp.Body.Close()
	switch code := resp.StatusCode; {
	case (code == http.StatusUnauthorized || code == http.StatusForbidden) && t.key == "":
		return fmt.Errorf("%s wants an API key: name a file with --api-key-file, or a variable with --api-key-env", t.url)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return fmt.Errorf("%s does not accept the API key (status %d)", t.url, code)
	case (code == http.StatusNotFound || code == http.StatusMethodNotAllowed) && t.model != "":
		return nil // it keeps no list; whether it has the model, its answers will tell
	case code == http.StatusNotFound:
		return fmt.Errorf("%s has no /v1/models: is that the base URL of an OpenAI server? If it keeps no list, name the model with --model", t.url)
	case code != http.StatusOK:
		return fmt.Errorf("%s answers status %d when asked for its models; it has to work before it can be measured", t.url, code)
	}
	return t.chooseModel(io.LimitReader(resp.Body, maxModelsBytes))
}

func (t *benchTarget) chooseModel(body io.Reader) error {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(body).Decode(&list); err != nil {
		return fmt.Errorf("%s answers /v1/models with something else than OpenAI's list: is that the base URL of an OpenAI server?", t.url)
	}
	var names, shown []string
	for _, m := range list.Data {
		names = append(names, m.ID)
		if len(shown) < 10 {
			shown = append(shown, fmt.Sprintf("%.100q", m.ID)) // quoted: it comes from outside
		} else if len(shown) == 10 {
			shown = append(shown, "...")
		}
	}
	switch {
	case len(names) == 0:
		return fmt.Errorf("%s lists no model: wait until a replica is ready", t.url)
	case t.model != "" && !slices.Contains(names, t.model):
		return fmt.Errorf("%s has no model %q; choose of %s with --model", t.url, t.model, strings.Join(shown, ", "))
	case t.model == "" && len(names) > 1:
		return fmt.Errorf("%s has several models; choose of %s with --model", t.url, strings.Join(shown, ", "))
	}
	t.model = cmp.Or(t.model, names[0])
	return nil
}
