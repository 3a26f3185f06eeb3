package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

const (
	maxBackends    = 4096
	defaultWait    = Duration(time.Minute)
	defaultTimeout = Duration(2 * time.Minute)
	maxDuration    = time.Hour
)

// Request is an action and the replicas on which it is carried out.
type Request struct {
	Action   Action   `json:"-"`
	Backends []string `json:"backends"` // names; nil: the body has none
	Timeout  Duration `json:"timeout"`  // of each call of a replica
}

// ParseRequest reads the JSON object of a request for the action of a name. An empty body has the defaults.
func ParseRequest(name string, body []byte) (*Request, error) {
	r := &Request{Action: newAction(name), Timeout: defaultTimeout}
	if r.Action == nil {
		return nil, fmt.Errorf("unknown action %q", name)
	}
	if len(bytes.TrimSpace(body)) > 0 {
		fields := map[string]json.RawMessage{}
		if err := decodeStrictly(body, &fields); err != nil {
			return nil, err
		}
		common := map[string]json.RawMessage{}
		for _, field := range []string{"backends", "timeout"} {
			if value, ok := fields[field]; ok {
				common[field] = value
				delete(fields, field)
			}
		}
		if err := errors.Join(remarshal(common, r), remarshal(fields, r.Action)); err != nil {
			return nil, err
		}
		if _, ok := common["backends"]; ok && len(r.Backends) == 0 {
			return nil, errors.New("backends is empty: name some, or leave it out for all")
		}
	}
	if len(r.Backends) > maxBackends {
		return nil, fmt.Errorf("backends has more than %d elements", maxBackends)
	}
	if err := r.Timeout.validate("timeout", time.Second/10); err != nil {
		return nil, err
	}
	return r, r.Action.validate()
}

// remarshal sets the fields of a struct, which must have all of them.
func remarshal(fields map[string]json.RawMessage, to any) error {
	body, err := json.Marshal(fields)
	if err != nil {
		return err
	}
	return decodeStrictly(body, to)
}

// decodeStrictly decodes one JSON value without unknown fields.
func decodeStrictly(body []byte, to any) error {
	in := json.NewDecoder(bytes.NewReader(body))
	in.DisallowUnknownFields()
	if err := in.Decode(to); err != nil {
		return fmt.Errorf("the body is not a valid request: %w", err)
	}
	if _, err := in.Token(); err != io.EOF {
		return errors.New("the body has more than one JSON value")
	}
	return nil
}

// Duration is a time.Duration that is written as text, such as "1m30s", in JSON.
type Duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	*d = Duration(parsed)
	return err
}

func (d Duration) validate(field string, min time.Duration) error {
	if time.Duration(d) < min || time.Duration(d) > maxDuration {
		return fmt.Errorf("%s must be from %v to %v", field, min, maxDuration)
	}
	return nil
}
