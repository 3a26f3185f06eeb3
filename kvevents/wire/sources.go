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
	Endpoint string // of live events: tcp://HOST:PORT
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

// ParseSources reads a replica's response to GET /kv_event_sources: the publishers of KV cache
// events in order of their data-parallel ranks, without those that are off. host is the replica's
// name or address: it replaces addresses that mean any interface. The error joins what is wrong
// with single publishers; the others are returned all the same, and a publisher of which only
// the replay endpoint cannot be used is returned without it.
func ParseSources(body []byte, host string) ([]Source, error) {
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
		s, err := newSource(c.Rank, 0, c.Endpoint, c.Replay, c.Topic, host)
		if err != nil {
			errs = append(errs, fmt.Errorf("KV event source of rank %d: %w", c.Rank, err))
		}
		if s.Endpoint != "" {
			sources = append(sources, s)
		}
	}
	return sources, errors.Join(errs...)
}

// ConfiguredSources returns the sources of data-parallel ranks 0 to ranks-1, where endpoint and
// replay ("": none) are those of rank 0, and each further rank has the next port, as in vLLM.
// host replaces addresses that mean any interface.
func ConfiguredSources(endpoint, replay, topic, host string, ranks int) ([]Source, error) {
	if ranks < 1 || ranks > maxRanks {
		return nil, fmt.Errorf("%d data-parallel ranks: want 1 to %d", ranks, maxRanks)
	}
	sources := make([]Source, ranks)
	for rank := range ranks {
		var err error
		if sources[rank], err = newSource(rank, rank, endpoint, replay, topic, host); err != nil {
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

// newSource resolves the endpoints of a rank, offset ports above those given. If only replay is
// wrong, it returns the source without it and the error.
func newSource(rank, offset int, endpoint, replay, topic, host string) (Source, error) {
	live, err := resolveEndpoint(endpoint, host, offset)
	if err != nil {
		return Source{}, fmt.Errorf("endpoint %q: %w", endpoint, err)
	}
	s := Source{Rank: rank, Endpoint: live, Topic: topic}
	if replay == "" {
		return s, nil
	}
	if s.Replay, err = resolveEndpoint(replay, host, offset); err != nil {
		return s, fmt.Errorf("replay_endpoint %q: %w", replay, err)
	}
	return s, nil
}

// resolveEndpoint returns a tcp endpoint with offset added to its port, where host has replaced
// an address that means any interface.
func resolveEndpoint(endpoint, host string, offset int) (string, error) {
	scheme, address, ok := strings.Cut(endpoint, "://")
	switch {
	case !ok:
		return "", errors.New("not of the form tcp://HOST:PORT")
	case scheme == "ipc" || scheme == "inproc":
		return "", fmt.Errorf("%s reaches processes of the replica's own machine only: start vLLM with a tcp endpoint, such as tcp://*:5557", scheme)
	case scheme != "tcp":
		return "", fmt.Errorf("scheme %q: only tcp can be used, such as tcp://*:5557", scheme)
	}
	colon := strings.LastIndexByte(address, ':')
	if colon < 0 {
		return "", errors.New("no port: want tcp://HOST:PORT")
	}
	bound := strings.TrimSuffix(strings.TrimPrefix(address[:colon], "["), "]")
	if strings.ContainsAny(bound, "[]/;@ ") {
		return "", errors.New("not of the form tcp://HOST:PORT")
	}
	port, err := strconv.ParseUint(address[colon+1:], 10, 16)
	if err != nil || port == 0 || port+uint64(offset) > 1<<16-1 {
		return "", fmt.Errorf("port %q with offset %d is not from 1 to 65535", address[colon+1:], offset)
	}
	switch {
	case isAnyInterface(bound):
		bound = host
	case isLoopback(bound) && !isLoopback(host):
		return "", fmt.Errorf("only the replica's own machine can reach this address: start vLLM with tcp://*:%d", port)
	}
	return "tcp://" + net.JoinHostPort(bound, strconv.FormatUint(port+uint64(offset), 10)), nil
}

func isAnyInterface(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || host == "*" || ip != nil && ip.IsUnspecified()
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
