package wire

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"warmroute/backends/transport"
	"warmroute/kvevents/zmtp"
)

const (
	// MaxSourcesBytes bounds a replica's response to GET /kv_event_sources.
	MaxSourcesBytes = 64 << 10

	maxRanks = 256 // of one replica
	maxRank  = 1<<16 - 1
)

// Source names a publisher of KV cache events.
type Source struct {
	Rank     int    // data-parallel rank
	Endpoint string // of live events: tcp://HOST:PORT; "": the publisher connects to us
	Replay   string // of earlier events: tcp://HOST:PORT; "": none
	Topic    string // prefix of the topics to subscribe to; "": all

	RefuseLocal bool // as in transport.Options
}

// dial connects to an endpoint of the source, as zmtp.Dial does.
func (s *Source) dial(ctx context.Context, endpoint string, own zmtp.SocketType) (conn *zmtp.Conn, release func(), err error) {
	if s.RefuseLocal {
		return zmtp.Dial(ctx, endpoint, own, transport.RefuseLocal)
	}
	return zmtp.Dial(ctx, endpoint, own, nil)
}

// Ports are those to which publishers can connect: Count of them from First on. None if it is zero.
type Ports struct{ First, Count int }

// ParseSources reads a replica's response to GET /kv_event_sources: the publishers of KV cache
// events in order of their data-parallel ranks, without those that are off. host is the replica's
// name or address: it replaces addresses that mean any interface. The error joins what is wrong
// with single publishers; the others are returned all the same, and a publisher of which only
// the replay endpoint cannot be used is returned without it. If there are ports of ours, a publisher whose endpoint
// is at another host than the replica, or at one of these ports, connects to us.
func ParseSources(body []byte, host string, ours Ports) ([]Source, error) {
	configs, err := parseSourceConfigs(body)
	if err != nil {
		return nil, fmt.Errorf("parse KV event sources: %w", err)
	}
	var sources []Source
	var errs []error
	for _, c := range configs {
		if c.Enabled != nil && !*c.Enabled || c.Publisher != nil && *c.Publisher != "zmq" {
			continue
		}
		s := Source{Rank: c.Rank, Topic: c.Topic}
		var err error
		connects := ours.isReachedBy(c.Endpoint, host)
		if connects {
			if _, err = ParseTopic(c.Topic); err != nil {
				err = fmt.Errorf("topic %q: %w", c.Topic, err)
			}
		} else if s.Endpoint, err = resolveEndpoint(c.Endpoint, host, 0); err != nil {
			err = fmt.Errorf("endpoint %q: %w", c.Endpoint, err)
		}
		if err == nil {
			err = s.setReplay(c.Replay, host, 0)
			sources = append(sources, s)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("KV event source of rank %d: %w", c.Rank, err))
		}
	}
	return sources, errors.Join(errs...)
}

// isReachedBy reports whether a publisher connects to us that reports an endpoint and runs on host. vLLM binds an endpoint without
// host and connects to any other, but reports the address that it has bound if its configuration leaves it the choice.
func (p Ports) isReachedBy(endpoint, host string) bool {
	bound, port, err := splitEndpoint(endpoint)
	if p.Count == 0 || err != nil || isAnyInterface(bound) {
		return false
	}
	isSameHost := NormalizeHost(bound) == NormalizeHost(host) || isLoopback(bound) && isLoopback(host)
	return !isSameHost || port >= p.First && port < p.First+p.Count
}

// ConfiguredSources returns the sources of data-parallel ranks 0 to ranks-1, where endpoint and
// replay ("": none) are those of rank 0, and each further rank has the next port, as in vLLM.
// host replaces addresses that mean any interface.
func ConfiguredSources(endpoint, replay, topic, host string, ranks int) ([]Source, error) {
	sources, err := AwaitedSources(replay, host, ranks)
	if err != nil {
		return nil, err
	}
	for rank := range sources {
		sources[rank].Topic = topic
		if sources[rank].Endpoint, err = resolveEndpoint(endpoint, host, rank); err != nil {
			return nil, fmt.Errorf("endpoint %q: %w", endpoint, err)
		}
	}
	return sources, nil
}

// AwaitedSources is ConfiguredSources for a replica that connects to us.
func AwaitedSources(replay, host string, ranks int) ([]Source, error) {
	if ranks < 1 || ranks > maxRanks {
		return nil, fmt.Errorf("%d data-parallel ranks: want 1 to %d", ranks, maxRanks)
	}
	sources := make([]Source, ranks)
	for rank := range sources {
		sources[rank].Rank = rank
		if err := sources[rank].setReplay(replay, host, rank); err != nil {
			return nil, err
		}
	}
	return sources, nil
}

// sourceConfig is what vLLM reports of one publisher.
type sourceConfig struct {
	Rank      int     `json:"data_parallel_rank"` // of elements of an array only
	Enabled   *bool   `json:"enable_kv_cache_events"`
	Publisher *string `json:"publisher"`
	Endpoint  string  `json:"endpoint"`
	Replay    string  `json:"replay_endpoint"`
	Topic     string  `json:"topic"`
}

// parseSourceConfigs reads an object whose keys are ranks, or an array.
func parseSourceConfigs(body []byte) ([]sourceConfig, error) {
	if len(body) > MaxSourcesBytes {
		return nil, fmt.Errorf("%d bytes, the limit is %d", len(body), MaxSourcesBytes)
	}
	var configs []sourceConfig
	if bytes.HasPrefix(bytes.TrimLeft(body, " \t\r\n"), []byte("{")) {
		var byRank map[int]sourceConfig
		if err := json.Unmarshal(body, &byRank); err != nil {
			return nil, err
		}
		for rank, c := range byRank {
			c.Rank = rank
			configs = append(configs, c)
		}
	} else if err := json.Unmarshal(body, &configs); err != nil {
		return nil, err
	}
	if len(configs) > maxRanks {
		return nil, fmt.Errorf("%d publishers, the limit is %d", len(configs), maxRanks)
	}
	slices.SortFunc(configs, func(a, b sourceConfig) int { return cmp.Compare(a.Rank, b.Rank) })
	for i, c := range configs {
		if c.Rank < 0 || c.Rank > maxRank {
			return nil, fmt.Errorf("rank %d is not from 0 to %d", c.Rank, maxRank)
		}
		if i > 0 && c.Rank == configs[i-1].Rank {
			return nil, fmt.Errorf("rank %d is listed twice", c.Rank)
		}
	}
	return configs, nil
}

// setReplay sets the replay endpoint ("": none), offset ports above the one given.
func (s *Source) setReplay(endpoint, host string, offset int) (err error) {
	if endpoint == "" {
		return nil
	}
	if s.Replay, err = resolveEndpoint(endpoint, host, offset); err != nil {
		return fmt.Errorf("replay_endpoint %q: %w", endpoint, err)
	}
	return nil
}

// resolveEndpoint returns a tcp endpoint with offset added to its port, where host has replaced
// an address that means any interface.
func resolveEndpoint(endpoint, host string, offset int) (string, error) {
	bound, port, err := splitEndpoint(endpoint)
	if err != nil {
		return "", err
	}
	if port == 0 || port+offset > maxPort {
		return "", fmt.Errorf("port %d with offset %d is not from 1 to %d", port, offset, maxPort)
	}
	switch {
	case isAnyInterface(bound):
		bound = host
	case isLoopback(bound) && !isLoopback(host):
		return "", fmt.Errorf("only the replica's own machine can reach this address: start vLLM with tcp://*:%d", port)
	}
	return "tcp://" + net.JoinHostPort(bound, strconv.Itoa(port+offset)), nil
}

const maxPort = 1<<16 - 1

// splitEndpoint returns the host and the port of a tcp endpoint.
func splitEndpoint(endpoint string) (host string, port int, err error) {
	scheme, address, ok := strings.Cut(endpoint, "://")
	switch {
	case !ok:
		return "", 0, errors.New("not of the form tcp://HOST:PORT")
	case scheme == "ipc" || scheme == "inproc":
		return "", 0, fmt.Errorf("%s reaches processes of the replica's own machine only: start vLLM with a tcp endpoint, such as tcp://*:5557",
			scheme)
	case scheme != "tcp":
		return "", 0, fmt.Errorf("scheme %q: only tcp can be used, such as tcp://*:5557", scheme)
	}
	colon := strings.LastIndexByte(address, ':')
	if colon < 0 {
		return "", 0, errors.New("no port: want tcp://HOST:PORT")
	}
	host = strings.TrimSuffix(strings.TrimPrefix(address[:colon], "["), "]")
	if strings.ContainsAny(host, "[]/;@ ") {
		return "", 0, errors.New("not of the form tcp://HOST:PORT")
	}
	n, err := strconv.ParseUint(address[colon+1:], 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("port %q is not from 1 to %d", address[colon+1:], maxPort)
	}
	return host, int(n), nil
}

// ListenAddresses returns the addresses, host:port, of so many ports from that of an endpoint on, for publishers that connect to us.
func ListenAddresses(endpoint string, ports int) ([]string, error) {
	host, port, err := splitEndpoint(endpoint)
	switch {
	case err != nil:
		return nil, err
	case port == 0 && ports > 1:
		return nil, fmt.Errorf("port 0 is a free one: name a port, so that the %d from there on are known", ports)
	case port+ports-1 > maxPort:
		return nil, fmt.Errorf("the last of %d ports from %d on exceeds %d", ports, port, maxPort)
	}
	if host == "*" {
		host = ""
	}
	addresses := make([]string, ports)
	for i := range addresses {
		addresses[i] = net.JoinHostPort(host, strconv.Itoa(port+i))
	}
	return addresses, nil
}

func isAnyInterface(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || host == "*" || ip != nil && ip.IsUnspecified()
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
