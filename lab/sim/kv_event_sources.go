package sim

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// replayPortOffset is the distance between the ports for events and for their replay.
const replayPortOffset = 1000

// KVEventsConfig describes the publisher of KV cache events, vLLM's --kv-events-config.
type KVEventsConfig struct {
	// Endpoint is a port on the address of the HTTP server, or tcp://HOST:PORT, where HOST
	// may be * for all addresses. Replays are served 1000 ports above. Rank r uses both ports
	// plus r; with port 0 all ports are free ones. Empty: no events.
	Endpoint string
	// Connect is the address tcp://HOST:PORT to which the publisher connects in place of binding Endpoint; rank r to the port
	// r above. It serves no replays then.
	Connect string
	Topic   string // with Connect, "" is kv@ADDRESS@MODEL
}

// isEnabled reports whether events are published.
func (c KVEventsConfig) isEnabled() bool { return c.Endpoint != "" || c.Connect != "" }

// connectAddress returns the address, host:port, to which the publisher of a rank connects.
func (c KVEventsConfig) connectAddress(rank int) (string, error) {
	address, isTCP := strings.CutPrefix(c.Connect, "tcp://")
	host, text, err := net.SplitHostPort(address)
	port, badPort := strconv.ParseUint(text, 10, 16)
	if !isTCP || err != nil || badPort != nil || port == 0 || host == "" || host == "*" {
		return "", fmt.Errorf("address %q to which KV events are sent is not of the form tcp://HOST:PORT", c.Connect)
	}
	if int(port)+rank > math.MaxUint16 {
		return "", fmt.Errorf("address %q to which KV events are sent: the port of rank %d exceeds %d", c.Connect, rank, math.MaxUint16)
	}
	return net.JoinHostPort(host, strconv.Itoa(int(port)+rank)), nil
}

// parseEndpoint splits Endpoint. host is empty for that of the HTTP server.
func (c KVEventsConfig) parseEndpoint() (host string, port int, err error) {
	text := c.Endpoint
	if address, ok := strings.CutPrefix(text, "tcp://"); ok {
		if host, text, err = net.SplitHostPort(address); err != nil {
			return "", 0, fmt.Errorf("endpoint %q of KV events: %w", c.Endpoint, err)
		}
		if host == "" {
			return "", 0, fmt.Errorf("endpoint %q of KV events has no host; use * for all addresses", c.Endpoint)
		}
	}
	if port, err = strconv.Atoi(text); err != nil || port < 0 || port > math.MaxUint16 {
		return "", 0, fmt.Errorf("endpoint %q of KV events is neither a port nor tcp://HOST:PORT", c.Endpoint)
	}
	return host, port, nil
}

// validate returns an error unless all ranks can have ports.
func (c KVEventsConfig) validate(ranks int) error {
	if c.Connect != "" {
		if c.Endpoint != "" {
			return errors.New("the publisher of KV events binds an endpoint or connects to an address: choose one of them")
		}
		_, err := c.connectAddress(ranks - 1)
		return err
	}
	if c.Endpoint == "" {
		return nil
	}
	_, port, err := c.parseEndpoint()
	if last := port + replayPortOffset + ranks - 1; err == nil && port > 0 && last > math.MaxUint16 {
		return fmt.Errorf("endpoint %q of KV events: port %d, for replays, exceeds %d", c.Endpoint, last, math.MaxUint16)
	}
	return err
}

// KVEventsBindError is why Bind failed if it was for one of the sockets for KV events.
type KVEventsBindError struct {
	Address string
	Err     error
}

func (e *KVEventsBindError) Error() string {
	return fmt.Sprintf("bind KV events of the simulated replica to %s: %v", e.Address, e.Err)
}

func (e *KVEventsBindError) Unwrap() error { return e.Err }

// HasKVEventSubscribers reports whether the KV events of each rank have a subscriber. What is published before is lost, as with vLLM.
func (s *Server) HasKVEventSubscribers() bool {
	return !slices.ContainsFunc(s.ranks[:s.CountRanks()], func(k *rank) bool { return k.publisher == nil || !k.publisher.hasSubscriber() })
}

// kvEventSources handles GET /kv_event_sources: the configuration of each rank's publisher.
func (s *Server) kvEventSources(w http.ResponseWriter, _ *http.Request) {
	b := []byte{'{'}
	for i, k := range s.ranks[:s.CountRanks()] {
		if k.publisher == nil {
			break // no rank has one
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `"`+strconv.Itoa(s.cfg.Rank.First+i)+`":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":`...)
		b = appendQuoted(b, k.publisher.live.endpoint)
		b = append(b, `,"replay_endpoint":`...)
		if k.publisher.replay.endpoint == "" {
			b = append(b, "null"...)
		} else {
			b = appendQuoted(b, k.publisher.replay.endpoint)
		}
		n := strconv.Itoa(maxBatches)
		b = append(b, `,"buffer_steps":`+n+`,"hwm":`+n+`,"max_queue_size":`+n+`,"topic":`...)
		b = append(appendQuoted(b, string(k.publisher.topic)), '}')
	}
	writeJSON(w, http.StatusOK, append(b, '}'))
}
