package redis

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestCheckOptions(t *testing.T) {
	for _, c := range []struct {
		options Options
		want    string // in the error; "": none
	}{
		{Options{Mode: ModeSingle, URL: "redis://"}, ""},
		{Options{Mode: ModeSingle, URL: "redis://host:6379/2"}, ""},
		{Options{Mode: ModeSingle, URL: "redis://host:6379/2/"}, ""},
		{Options{Mode: ModeSingle, URL: "rediss://user:secret@host:6379?skip_verify=T"}, ""},
		{Options{Mode: ModeSingle, URL: "unix:///run/redis.sock?db=1"}, ""},
		{Options{Mode: ModeSentinel, URL: "redis://host:26379?master_name=m&addr=other:26379"}, ""},
		{Options{Mode: ModeCluster, URL: "redis://host:6379/0?addr=other:6379&db=0"}, ""},
		{Options{Mode: ModeCluster, URL: "rediss://host:6379?skip_verify=true"}, ""},
		{Options{Mode: ModeSingle, URL: "http://user:secret@host"}, "invalid URL scheme"},
		{Options{Mode: ModeSingle, URL: "redis://user:sec%ret@host"}, "is not a valid URL"},
		{Options{Mode: ModeSingle, URL: "redis://user:secret@host:port"}, "is not a valid URL"},
		{Options{Mode: ModeCluster, URL: "unix:///run/redis.sock"}, "invalid URL scheme"},
		{Options{Mode: ModeSentinel, URL: "redis://host:26379"}, "has no master_name"},
		{Options{Mode: ModeSentinel, URL: "unix:///run/redis.sock?master_name=m"}, "invalid URL scheme"},
		{Options{Mode: ModeSingle, URL: "redis://host?addr=other:6379"}, `unknown parameter "addr": remove it`},
		{Options{Mode: ModeSingle, URL: "redis://host?skip_verify=true"}, `unknown parameter "skip_verify": remove it`},
		{Options{Mode: ModeSingle, URL: "redis://host?dail_timeout=1s"}, `unknown parameter "dail_timeout": remove it`},
		{Options{Mode: ModeSingle, URL: "redis://host?dial_timeout=soon"}, "invalid dial_timeout duration"},
		{Options{Mode: ModeSingle, URL: "redis://host?read_timeout=0"}, "read_timeout or write_timeout is not above 0"},
		{Options{Mode: ModeSingle, URL: "redis://host?write_timeout=1h"}, "at most 1m"},
		{Options{Mode: ModeSingle, URL: "redis://host?pool_size=1"}, "pool_size is not between 4 and"},
		{Options{Mode: ModeSingle, URL: "redis://host?pool_size=99999999999"}, "pool_size is not between"},
		{Options{Mode: ModeSingle, URL: "redis://host?min_idle_conns=99999999999"}, "a number of connections"},
		{Options{Mode: ModeSingle, URL: "redis://host?pipeline_pool_size=99999999999"}, "pipeline_pool_size"},
		{Options{Mode: ModeSingle, URL: "redis://host?pipeline_read_buffer_size=99999999999"}, "the size of a buffer"},
		{Options{Mode: ModeSingle, URL: "redis://host?max_retries=99"}, "max_retries"},
		{Options{Mode: ModeSingle, URL: "redis://host?protocol=4"}, "protocol is neither 2 nor 3"},
		{Options{Mode: ModeSentinel, URL: "redis://host?master_name=m&replica_only=true"}, "reads replicas"},
		{Options{Mode: ModeSentinel, URL: "redis://host?master_name=m&route_randomly=true"}, "reads replicas"},
		{Options{Mode: ModeCluster, URL: "redis://host?read_only=true"}, "reads replicas"},
		{Options{Mode: ModeCluster, URL: "redis://host?max_redirects=99"}, "max_redirects"},
		{Options{Mode: ModeCluster, URL: "redis://host?addr=other"}, "addr is not a host and a port"},
		{Options{Mode: ModeCluster, URL: "redis://host/1"}, "invalid number of a database"},
		{Options{Mode: ModeSingle, URL: "redis://host/x"}, "invalid number of a database"},
		{Options{Mode: ModeSingle, URL: "redis://host/1/2"}, "invalid number of a database"},
		{Options{Mode: ModeSingle, URL: "rediss://host?skip_verify=maybe"}, "skip_verify is neither"},
		{Options{Mode: ModeSingle, URL: "host:6379"}, "invalid URL scheme"},
		{Options{Mode: ModeSingle, URL: "unix://"}, "empty unix socket path"},
		{Options{Mode: ModeSingle, URL: "redis://host", CA: "x", CAFile: "f"}, "does not begin with rediss://"},
		{Options{Mode: ModeSingle, URL: "rediss://host", CA: "x", CAFile: "f"}, "f contains no certificate"},
	} {
		err := CheckOptions(c.options)
		if c.want == "" {
			if err != nil {
				t.Errorf("%+v: %v", c.options, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%+v: %v, want an error with %q", c.options, err, c.want)
		}
	}
}

// What redis.url said before it had the parameters of the library it still says.
func TestParseURL(t *testing.T) {
	parse := func(mode, url, password string) *options {
		t.Helper()
		p, err := (&Options{Mode: mode, URL: url, Password: password}).parse()
		if err != nil {
			t.Fatalf("%s: %v", url, err)
		}
		return p
	}
	for _, c := range []struct {
		url, password          string
		network, address       string
		wantUser, wantPassword string
		database               int
	}{
		{"redis://", "", "tcp", "localhost:6379", "", "", 0},
		{"redis://user:a%2Fb@[::1]:7000/2", "", "tcp", "[::1]:7000", "user", "a/b", 2},
		{"redis://user@host?db=3", "p", "tcp", "host:6379", "user", "p", 3},
		{"unix://:p@/run/redis.sock?db=1", "", "unix", "/run/redis.sock", "", "p", 1},
	} {
		l := parse(ModeSingle, c.url, c.password).single
		if l.Network != c.network || l.Addr != c.address || l.Username != c.wantUser || l.Password != c.wantPassword || l.DB != c.database {
			t.Errorf("%s: %s %s, %q, %q, database %d", c.url, l.Network, l.Addr, l.Username, l.Password, l.DB)
		}
	}
	s := parse(ModeSentinel, "redis://s:sp@host:26379/1?master_name=m&addr=other:26379&username=u", "p").sentinel
	if !reflect.DeepEqual(s.SentinelAddrs, []string{"host:26379", "other:26379"}) || s.MasterName != "m" || s.DB != 1 ||
		s.Username != "u" || s.Password != "p" || s.SentinelUsername != "s" || s.SentinelPassword != "sp" {
		t.Errorf("%+v", s)
	}
	c := parse(ModeCluster, "redis://host/0?addr=other:1&addr=third:2", "").cluster
	if !reflect.DeepEqual(c.Addrs, []string{"host:6379", "other:1", "third:2"}) {
		t.Errorf("%+v", c)
	}
	p := parse(ModeCluster, "rediss://host?skip_verify=true&addr=other:1", "")
	if p.tls == nil || !p.tls.InsecureSkipVerify || !reflect.DeepEqual(p.hosts, []string{"host", "other"}) {
		t.Errorf("TLS %+v, hosts %v", p.tls, p.hosts)
	}
}

// The parameters of the library are those of the URL, in each mode.
func TestLibraryParameters(t *testing.T) {
	const parameters = "client_name=c&protocol=3&max_retries=2&min_retry_backoff=1ms&max_retry_backoff=2ms&dial_timeout=3&" +
		"read_timeout=6s&write_timeout=5s&pool_fifo=true&pool_size=8&pool_timeout=4s&min_idle_conns=1&" +
		"max_idle_conns=2&max_active_conns=9&conn_max_lifetime=1m&conn_max_idle_time=2m&pipeline_pool_size=5"
	for mode, url := range map[string]string{
		ModeSingle:   "redis://host?",
		ModeSentinel: "redis://host?master_name=m&addr=other:1&",
		ModeCluster:  "redis://host?addr=other:1&max_redirects=5&",
	} {
		p, err := (&Options{Mode: mode, URL: url + parameters}).parse()
		if err != nil {
			t.Fatal(err)
		}
		var l any
		dial := 3 * time.Second
		switch mode {
		case ModeSingle:
			l = *p.single
		case ModeSentinel:
			l, dial = *p.sentinel, dial+3*6*time.Second
		case ModeCluster:
			l = *p.cluster
		}
		for name, want := range map[string]any{
			"ClientName": "c", "Protocol": 3, "MaxRetries": 2, "MinRetryBackoff": time.Millisecond,
			"MaxRetryBackoff": 2 * time.Millisecond, "DialTimeout": dial, "ReadTimeout": 6 * time.Second,
			"WriteTimeout": 5 * time.Second, "PoolFIFO": true, "PoolSize": 8,
			"PoolTimeout": 4 * time.Second, "MinIdleConns": 1, "MaxIdleConns": 2, "MaxActiveConns": 9, "ConnMaxLifetime": time.Minute,
			"ConnMaxIdleTime": 2 * time.Minute, "PipelinePoolSize": 5, "ContextTimeoutEnabled": true,
		} {
			if got := reflect.ValueOf(l).FieldByName(name).Interface(); got != want {
				t.Errorf("mode %s: %s is %v, want %v", mode, name, got, want)
			}
		}
		if p.dialTimeout != 3*time.Second || p.readTimeout != 6*time.Second {
			t.Errorf("mode %s: dial within %v, read within %v", mode, p.dialTimeout, p.readTimeout)
		}
	}
}

// FuzzURL asserts that no URL makes the library panic, and that no error shows the password.
func FuzzURL(f *testing.F) {
	f.Add(ModeSingle, "redis://host?pool_size=99999999999")
	f.Add(ModeSentinel, "rediss://host:26379?master_name=m&addr=a:1&route_by_latency=1")
	f.Add(ModeCluster, "redis://host?addr=a:1&read_only=true&db=0")
	f.Fuzz(func(t *testing.T, mode, url string) {
		p, err := (&Options{Mode: mode, URL: url}).parse()
		if err != nil {
			return
		}
		if strings.Contains(url, "idle") { // which begin connections
			return
		}
		d := newDialer(p)
		d.closeAll()
		p.newLibraryClient(d, time.Time{}).Close()
	})
}
