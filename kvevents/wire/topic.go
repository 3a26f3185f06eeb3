package wire

import (
	"errors"
	"net"
	"net/netip"
	"strings"
)

// MaxTopicBytes bounds the topic of a publisher that connects to us.
const MaxTopicBytes = 512

// Topic is what the topic kv@ADDRESS@MODEL of a publisher says of its replica. ADDRESS is a host, or host:port.
type Topic struct {
	Host  string // as NormalizeHost returns it
	Port  string // "": not stated
	Model string
}

// ParseTopic reads a topic of the form kv@ADDRESS@MODEL.
func ParseTopic(text string) (Topic, error) {
	invalid := errors.New("the topic is not of the form kv@ADDRESS@MODEL, such as kv@10.0.0.5:8000@qwen")
	rest, isKV := strings.CutPrefix(text, "kv@")
	address, model, hasModel := strings.Cut(rest, "@")
	if !isKV || !hasModel || model == "" || len(text) > MaxTopicBytes {
		return Topic{}, invalid
	}
	host, port := address, ""
	if _, err := netip.ParseAddr(address); err != nil && strings.ContainsAny(address, ":[") { // else it may be an IPv6 address alone
		if host, port, err = net.SplitHostPort(address); err != nil || port == "" {
			return Topic{}, invalid
		}
	}
	if host = NormalizeHost(host); host == "" || strings.ContainsAny(host, "/ ") {
		return Topic{}, invalid
	}
	return Topic{host, port, model}, nil
}

// NormalizeHost returns an IP address in its shortest form, or a name in lower case.
func NormalizeHost(host string) string {
	if address, err := netip.ParseAddr(host); err == nil {
		return address.Unmap().String()
	}
	return strings.ToLower(host)
}
