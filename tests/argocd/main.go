// The parts of Argo CD that sync, and the Redis that they need, in one program: the first argument is the part.
package main

import (
	"fmt"
	"os"

	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	repositories "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"

	"github.com/alicebob/miniredis/v2"
	"github.com/spf13/cobra"
)

func main() {
	program := &cobra.Command{Use: "argocd", SilenceUsage: true}
	redis := &cobra.Command{
		Use:  "redis ADDRESS",
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, arguments []string) error {
			if err := miniredis.NewMiniRedis().StartAddr(arguments[0]); err != nil {
				return err
			}
			select {}
		},
	}
	for name, part := range map[string]*cobra.Command{
		"application-controller": controller.NewCommand(),
		"repo-server":            repositories.NewCommand(),
		"redis":                  redis,
	} {
		part.Use = name
		program.AddCommand(part)
	}
	if err := program.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
