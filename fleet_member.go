package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"slices"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/backends/transport"
	"warmroute/config"
)

// member is a backend of the fleet with what runs for it.
type member struct {
	backend    *backends.Backend
	options    transportOptions
	tls        *tls.Config            // nil: the defaults
	transports []*transport.Transport // the two that it has, and before them others with requests under way

	joined   time.Time          // zero: it was there from the start
	leaving  context.CancelFunc // ends its leave; nil: it stays
	stop     context.CancelFunc // ends what follows it
	followed sync.WaitGroup
}

// transportOptions are the settings that all transports have.
type transportOptions struct {
	connect, idle time.Duration
	connections   int // to one replica, for requests
}

func transportOptionsOf(c *config.Config) transportOptions {
	return transportOptions{c.Timeouts.Connect, c.Timeouts.KeepaliveIdle, c.Connections.MaxPerBackend}
}

func newMember(c config.Backend, o transportOptions) (*member, error) {
	u, err := backends.ParseURL(c.URL)
	if err != nil {
		return nil, fmt.Errorf("backend %s: %w", c.Name, err)
	}
	secured, err := c.TLSConfig()
	if err != nil {
		return nil, fmt.Errorf("backend %s: certificate: %w", c.Name, err)
	}
	t := transport.New(transport.Options{
		URL: u, TLS: secured, ConnectTimeout: o.connect, IdleTimeout: o.idle, MaxConns: o.connections,
	})
	probe := transport.New(transport.Options{URL: u, TLS: secured, ConnectTimeout: o.connect, IdleTimeout: o.idle})
	b := backends.New(c.Name, u, c.APIKey, t)
	b.SetOptions(backends.Options{APIKey: c.APIKey, MaxInFlight: c.MaxInFlight, Weight: c.Weight, Transport: t, ProbeTransport: probe})
	return &member{backend: b, options: o, tls: secured, transports: []*transport.Transport{t, probe}}, nil
}

// replaces reports whether old is the same replica under the same name: it need
// not leave for m.
func (m *member) replaces(old *member) bool {
	return m.backend.Name == old.backend.Name && backends.Address(m.backend.URL) == backends.Address(old.backend.URL)
}

// clashes reports whether the two cannot be there together.
func (m *member) clashes(other *member) bool {
	return m.backend.Name == other.backend.Name || backends.Address(m.backend.URL) == backends.Address(other.backend.URL)
}

// become gives m the terms of fresh, and its transports where they are others:
// what is under way goes on over those that it began with.
func (m *member) become(fresh *member) {
	if m.leaving != nil {
		m.leaving()
		m.leaving = nil
		m.backend.Restore()
	}
	m.transports = slices.DeleteFunc(m.transports, func(t *transport.Transport) bool {
		terms := m.backend.Options()
		return t.Open() == 0 && t != terms.Transport && t != terms.ProbeTransport
	})
	terms := *fresh.backend.Options()
	if m.options != fresh.options || !sameTLS(m.tls, fresh.tls) {
		m.closeIdle()
		m.transports = append(m.transports, fresh.transports...)
	} else {
		terms.Transport, terms.ProbeTransport = m.backend.Options().Transport, m.backend.Options().ProbeTransport
	}
	m.options, m.tls = fresh.options, fresh.tls
	m.backend.SetOptions(terms)
}

// sameTLS compares what config.Backend.tlsConfig makes.
func sameTLS(a, b *tls.Config) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.ServerName == b.ServerName && a.RootCAs.Equal(b.RootCAs)
}

func (m *member) closeIdle() {
	for _, t := range m.transports {
		t.CloseIdleConnections()
	}
}

func (m *member) close() {
	for _, t := range m.transports {
		t.Close()
	}
}
